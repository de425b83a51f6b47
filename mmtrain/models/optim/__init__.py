"""What optimizers share: names and shards of parameters, initial weights, gradient clipping and moments in bf16."""
