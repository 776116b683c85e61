"""Parts of `conduit.backends.emulated`: memories that are as large as a topology says, and transfers that take as long."""
