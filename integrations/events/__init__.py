"""KV events in vLLM's and SGLang's wire formats: governed blocks out, foreign engines' streams in."""
