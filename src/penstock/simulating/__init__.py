"""simulating"""
