//! What would keep a server from serving its bindings, without serving them.

use std::collections::HashMap;
use std::sync::Arc;

use pagetide_sources::Location;

use crate::listener;
use crate::metrics::Metrics;
use crate::named_image::{NamedImage, NoImage, Offer};
use crate::options::{Binding, Options};
use crate::server::{StartError, check_all};
use crate::state::check_length;

/// Looks for all that is wrong: opens each image, and looks whether each socket could be made. Binds nothing, and a
/// server that runs already is no fault.
pub fn check(options: &Options) -> Vec<StartError> {
    if let Err(error) = check_all(options) {
        return vec![error];
    }
    let mut wrong = Vec::new();
    if let Some(state) = &options.state
        && let Err(error) = check_length(&state.directory)
    {
        wrong.push(StartError::State(error));
    }
    let mut images: HashMap<&Location, Option<Arc<NamedImage>>> = HashMap::new();
    for binding in &options.bindings {
        let image = images.entry(&binding.image).or_insert_with(|| {
            let opened = NamedImage::open(&binding.image, options, &Metrics::default());
            opened
                .map(Arc::new)
                .map_err(|error| wrong.push(StartError::Image(error)))
                .ok()
        });
        // An image that cannot be opened is said once.
        if let Some(image) = image
            && let Err(error) = check_offer(image, binding, options)
        {
            wrong.push(StartError::Image(error));
        }
        if let Err(error) = listener::check(&binding.socket) {
            wrong.push(StartError::Listen(error));
        }
    }
    wrong
}

/// The digest and the state file that a binding names.
fn check_offer(
    image: &Arc<NamedImage>,
    binding: &Binding,
    options: &Options,
) -> Result<(), NoImage> {
    let offer = Offer::new(Arc::clone(image), binding.clone());
    offer.opened(&binding.options(options)).map(drop)
}
