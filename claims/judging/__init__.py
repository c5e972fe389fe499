"""What a claim is, how it is judged, and the ledger of verdicts."""
