"""How controller, agent and worker talk: messages, frames, proof of the token, TLS, and the channel over them."""
