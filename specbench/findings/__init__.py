"""What commands find out: ids with numbers (``catalog``), and what is doubtful about a run (``review``)."""
