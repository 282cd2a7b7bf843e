"""What structured output costs: tokens beside free answers, masks by schema, costly grammars."""
