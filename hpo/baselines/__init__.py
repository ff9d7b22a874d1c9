"""Baselines that a search is held against: a grid, and a learning-rate range test."""
