"""One file a step of the history, oldest first."""
