"""The host's path of a call: binding the ops, planning, launching, recording, repeating."""
