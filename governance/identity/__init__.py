"""Who asks, of which model, for whose blocks: principals, model identities, domains, and their canonical bytes."""
