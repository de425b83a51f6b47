"""Plans of other problems than the recipe's: the model without media, nearby settings, the data seen so far."""
