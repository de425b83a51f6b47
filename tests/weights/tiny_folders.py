"""Folders of tiny models that tests write."""

# In the place of the two thousand that users get, whose pictures take longer to draw than most tests to run.
FEW_CONVERSATIONS = 200
