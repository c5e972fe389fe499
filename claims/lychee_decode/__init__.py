"""What LycheeDecode claims, a file each."""
