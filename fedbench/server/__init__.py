"""Server rules: how the server moves its model to the mean of the clients' uploads (option `server`)."""
