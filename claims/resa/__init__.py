"""What ReSA claims, a file each."""
