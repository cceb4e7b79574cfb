"""What libraries that quantise a model keep of its weights; tests/test_quantised.py holds each name against them."""
