"""What TidalDecode claims, a file each."""
