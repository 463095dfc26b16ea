"""Programs that the training tests run and kill, and what watches over them."""
