"""What LessIsMore claims, a file each."""
