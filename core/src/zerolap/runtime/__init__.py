"""What happens on a rank while it trains."""
