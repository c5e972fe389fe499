"""What LycheeCluster's index still finds after thousands of decoded tokens, by how it is kept up (section 4.4)."""
