"""What the bench holds its figures against."""
