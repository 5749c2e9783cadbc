"""What processes of one server say to each other, and how."""
