"""What training states look like, and how they are placed."""
