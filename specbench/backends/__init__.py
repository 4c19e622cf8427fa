"""What makes passes."""
