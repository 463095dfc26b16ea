"""Object stores (S3, Google Cloud Storage, Azure) by way of obstore. `store` is the backend."""
