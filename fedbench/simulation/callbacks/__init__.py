"""Callbacks of a run: tables, checkpoints, progress, matrices, W&B, TensorBoard, MLflow."""
