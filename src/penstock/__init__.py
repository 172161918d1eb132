"""Penstock: pipeline-parallel training for any PyTorch module."""
