//! What can be asked: an action's types, its handler, and the router that joins the two.

use std::any::TypeId;
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::call::{Call, Dispatch};
use crate::error::RpcError;
use crate::keys::KeyStore;

/// One thing a peer can be asked to do.
///
/// `Params`, `Result` and `Chunk` must be written as JSON objects (structs with named fields, or
/// [`Empty`]): not every codec carries anything else.
pub trait Action: Send + Sync + 'static {
    /// The name on the wire.
    const NAME: &'static str;
    /// What the caller sends.
    type Params: Serialize + DeserializeOwned + Send + Sync + 'static;
    /// What ends the call.
    type Result: Serialize + DeserializeOwned + Send + Sync + 'static;
    /// What it may stream before the result; [`Never`] when it streams nothing.
    type Chunk: Serialize + DeserializeOwned + Send + Sync + 'static;
}

/// Whether the action can stream.
pub(crate) fn streams<A: Action>() -> bool {
    TypeId::of::<A::Chunk>() != TypeId::of::<Never>()
}

/// The chunk of an action that streams nothing. It has no values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Never {}

/// Parameters or a result without members: `{}`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Empty {}

/// Does the work of one action.
///
/// The future is polled for the first time by the task that reads the connection, so that calls
/// start in the order in which they were sent; it must not block. It is dropped when the call is
/// cancelled, when its deadline passes and when the connection breaks: whatever it holds must clean
/// up in `drop`.
pub trait Handle<A: Action>: Send + Sync + 'static {
    /// Answers one call.
    fn handle(
        &self,
        params: A::Params,
        call: Call<A>,
    ) -> impl Future<Output = Result<A::Result, RpcError>> + Send;
}

pub(crate) type Running = Pin<Box<dyn Future<Output = ()> + Send>>;

/// How one action is served.
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    pub(crate) streams: bool,
    start: Box<dyn Fn(Dispatch) -> Running + Send + Sync>,
}

impl Entry {
    pub(crate) fn start(&self, dispatch: Dispatch) -> Running {
        (self.start)(dispatch)
    }
}

/// The actions one end of a connection serves. Cheap to clone; one router serves all connections of
/// a server, and remembers request keys across them.
#[derive(Clone)]
pub struct Router(Arc<Inner>);

struct Inner {
    entries: HashMap<&'static str, Arc<Entry>>,
    keys: Arc<KeyStore>,
}

impl Router {
    /// A router that serves nothing: for an end that only calls.
    pub fn empty() -> Self {
        RouterBuilder::new(Arc::new(())).build()
    }

    /// Begins a router whose handlers live on `state`.
    pub fn builder<S: Send + Sync + 'static>(state: Arc<S>) -> RouterBuilder<S> {
        RouterBuilder::new(state)
    }

    pub(crate) fn find(&self, action: &str) -> Option<&Entry> {
        self.0.entries.get(action).map(AsRef::as_ref)
    }

    pub(crate) fn keys(&self) -> &Arc<KeyStore> {
        &self.0.keys
    }
}

impl fmt::Debug for Router {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names: Vec<_> = self.0.entries.keys().collect();
        names.sort();
        f.debug_tuple("Router").field(&names).finish()
    }
}

/// Registers handlers; see [`Router::builder`].
pub struct RouterBuilder<S> {
    state: Arc<S>,
    entries: HashMap<&'static str, Arc<Entry>>,
    keys: KeyStore,
}

impl<S> fmt::Debug for RouterBuilder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RouterBuilder").finish_non_exhaustive()
    }
}

impl<S: Send + Sync + 'static> RouterBuilder<S> {
    fn new(state: Arc<S>) -> Self {
        Self {
            state,
            entries: HashMap::new(),
            keys: KeyStore::default(),
        }
    }

    /// Serves `A` by the state's handler for it. Does not compile without one.
    pub fn on<A: Action>(mut self) -> Self
    where
        S: Handle<A>,
    {
        let state = Arc::clone(&self.state);
        let start = move |dispatch: Dispatch| -> Running {
            Box::pin(dispatch.run::<A, S>(Arc::clone(&state)))
        };
        let entry = Entry {
            name: A::NAME,
            streams: streams::<A>(),
            start: Box::new(start),
        };
        self.entries.insert(A::NAME, Arc::new(entry));
        self
    }

    /// Serves also what `router` serves, but for what this one serves itself.
    pub fn and(mut self, router: &Router) -> Self {
        for (name, entry) in &router.0.entries {
            self.entries
                .entry(name)
                .or_insert_with(|| Arc::clone(entry));
        }
        self
    }

    /// Remembers request keys within these bounds instead of the default ones.
    pub fn keys(mut self, keys: KeyStore) -> Self {
        self.keys = keys;
        self
    }

    /// The finished router.
    pub fn build(self) -> Router {
        Router(Arc::new(Inner {
            entries: self.entries,
            keys: Arc::new(self.keys),
        }))
    }
}

/// Declares a closed list of actions and, for it, a function that makes a router. The router does
/// not compile unless the state handles **every** action of the list.
///
/// ```
/// use box_rpc::{Action, Call, Empty, Handle, Never, RpcError, contract};
///
/// pub struct Health;
/// impl Action for Health {
///     const NAME: &'static str = "health";
///     type Params = Empty;
///     type Result = Empty;
///     type Chunk = Never;
/// }
///
/// contract! {
///     /// What a server must answer.
///     pub Served: Health
/// }
///
/// struct Server;
/// impl Handle<Health> for Server {
///     async fn handle(&self, _: Empty, _: Call<Health>) -> Result<Empty, RpcError> {
///         Ok(Empty {})
///     }
/// }
/// let router = Served::router(std::sync::Arc::new(Server)).build();
/// assert_eq!(Served::NAMES, ["health"]);
/// ```
///
/// A state that lacks a handler is refused by the compiler:
///
/// ```compile_fail
/// # use box_rpc::{Action, Empty, Never, contract};
/// # pub struct Health;
/// # impl Action for Health {
/// #     const NAME: &'static str = "health";
/// #     type Params = Empty;
/// #     type Result = Empty;
/// #     type Chunk = Never;
/// # }
/// # contract! { /// What a server must answer.
/// # pub Served: Health }
/// struct Forgetful;
/// let router = Served::router(std::sync::Arc::new(Forgetful)).build();
/// ```
#[macro_export]
macro_rules! contract {
    ($(#[$doc:meta])* $vis:vis $name:ident: $($action:ty),+ $(,)?) => {
        $(#[$doc])*
        #[derive(Debug)]
        $vis struct $name;

        impl $name {
            /// The names of all its actions.
            pub const NAMES: &'static [&'static str] =
                &[$(<$action as $crate::Action>::NAME),+];

            /// A router that serves all of them from `state`.
            pub fn router<S>(state: ::std::sync::Arc<S>) -> $crate::RouterBuilder<S>
            where
                S: $($crate::Handle<$action> +)+ Send + Sync + 'static,
            {
                $crate::Router::builder(state)$(.on::<$action>())+
            }
        }
    };
}
