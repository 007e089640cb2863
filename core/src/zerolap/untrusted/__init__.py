"""Files and messages that others may have made, read without running anything in them."""
