"""What people look at: tables and pictures of runs."""
