"""The passes of this folder give a program other forms, which fuse better or send fewer bytes."""
