"""What LycheeCluster claims, a file each."""
