"""Other forms of the same program, which fuse better or send fewer bytes."""
