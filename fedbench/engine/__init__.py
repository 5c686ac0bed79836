"""The cohort engine: clients as rows, local steps, gradients, executors, processes, what is sent and kept."""
