"""The Device level: memory that peers can reach, signals and epochs, and the limits on waiting for them."""
