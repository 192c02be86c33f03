"""How many blocks fit on a device, from the model's config and the available memory."""
