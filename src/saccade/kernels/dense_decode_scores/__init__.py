"""Dense decoding attention that can keep the scores it computes anyway."""
