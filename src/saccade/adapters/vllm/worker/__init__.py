"""The worker's process: what runs beside the model."""
