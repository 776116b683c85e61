"""The experience path itself: everything that is neither a framework's nor a machine's."""
