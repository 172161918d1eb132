"""What processes of the pool run: one file for each topic of the tests."""
