"""What steps and requests cost. Neither torch nor a network library is imported here."""
