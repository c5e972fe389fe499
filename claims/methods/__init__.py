"""Methods that claims compare ours with, a file each; they run in transformers."""
