"""What memory there is and how it is connected."""
