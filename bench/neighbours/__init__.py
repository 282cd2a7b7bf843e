"""The service of a well-behaved tenant before and during attacks of others, on the product."""
