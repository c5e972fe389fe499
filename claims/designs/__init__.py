"""How a claim's samples are made: questions about long texts, passages of plain text, or a benchmark's file."""
