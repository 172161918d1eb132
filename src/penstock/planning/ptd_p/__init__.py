"""PTD-P: pipeline, tensor and data parallelism for a transformer."""
