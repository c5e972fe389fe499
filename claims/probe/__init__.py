"""What `saccade` claims of its probe, a file each."""
