"""How controller, agent and worker talk: messages, frames, proof of the run secret, TLS, and the channel over them."""
