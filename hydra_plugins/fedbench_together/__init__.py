"""hydra/launcher=together: the cells of a sweep in one process, computed together where they can be."""
