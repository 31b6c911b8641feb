# %% [markdown]
# # own_method
#
# Text.

# %%
print(1)
