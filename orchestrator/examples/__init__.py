"""What is played next, what is not played again, and what is played to evaluate."""
