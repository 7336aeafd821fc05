"""One spelling for each collective, and for what stands around it."""
