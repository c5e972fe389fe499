"""Chunks of text under Quest's bounds (the pilot study of LycheeCluster, section 3.1)."""
